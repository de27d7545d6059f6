"""timm without torch's compiler, until someone compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def in_a_process(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


LOADED = "def loaded(): return {'torch._dynamo', 'sympy', 'torch.fx.experimental.symbolic_shapes'} & set(sys.modules)"


@pytest.mark.parametrize("backbone", ["vit_mini_patch4_32", "deit_tiny_patch16_224"])
def test_training_needs_no_compiler(backbone: str) -> None:
    in_a_process(f"""
import sys, numpy, morecl
{LOADED}
learner = morecl.create(
    "more", backbone={backbone!r}, image_size=32, pretrained=False, epochs=1, batch_size=2, bottleneck=4, device="cpu"
)
learner.learn_task(numpy.zeros((4, 32, 32, 3), "uint8"), [0, 1, 0, 1])
learner.learn_task(numpy.zeros((4, 32, 32, 3), "uint8"), [2, 3, 2, 3])
learner.predict(numpy.zeros((4, 32, 32, 3), "uint8"))
assert not loaded(), loaded()
""")


def test_what_timm_and_torchvision_took_works_with_the_compiler_they_did_not_import() -> None:
    in_a_process(f"""
import gc, sys, torch, morecl.nn
{LOADED}
from timm.models.naflexvit import NaFlexRopeIterator
from torchvision.ops import roi_align
from torchvision.ops.roi_align import is_compile_supported
assert gc.isenabled() and not loaded()
class Rope:
    depth = num_heads = dim = 1
    def get_embed(self, shape): return torch.ones(1, 1, *shape)
rope = NaFlexRopeIterator(Rope(), {{}}, [], 1, 1, torch.device("cpu"), torch.float32)
assert next(rope).shape[0] == 1 and loaded()
import torch._dynamo.utils
assert type(torch._dynamo) is type(sys) is type(torch._dynamo.utils)
assert is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert roi_align(torch.ones(1, 1, 4, 4), [torch.tensor([[0.0, 0.0, 3.0, 3.0]])], 2).shape == (1, 1, 2, 2)
""")


def test_with_a_torch_that_lacks_the_private_name_timm_imports_the_compiler() -> None:
    in_a_process(f"""
import sys, torch._compile
{LOADED}
del torch._compile._disable_dynamo
import morecl.nn, timm
assert loaded() and sys.modules["torch._dynamo"].__file__
assert timm.create_model("vit_tiny_patch16_224", num_classes=0)(torch.zeros(1, 3, 224, 224)).shape == (1, 192)
""")


@pytest.mark.parametrize(
    "asked",
    [
        "from torch._dynamo.utils import counters",
        "import torch._dynamo.config",
        "from torch._dynamo import optimize",
        "import torch._dynamo; torch._dynamo.reset()",
    ],
)
def test_whoever_asks_for_more_gets_the_real_compiler(asked: str) -> None:
    in_a_process(f"""
import sys, torch
from morecl.nn.late_compiler import compiler_later
with compiler_later():
    {asked}
    assert sys.modules["torch._dynamo"].__file__ and sys.modules["torch._dynamo.utils"].__file__
import torch._dynamo
assert torch._dynamo.utils.is_compile_supported is sys.modules["torch._dynamo.utils"].is_compile_supported
""")
