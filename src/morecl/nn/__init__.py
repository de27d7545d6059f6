"""Networks: backbones, adapters, kernels."""

from morecl.nn.late_compiler import import_timm

import_timm()
