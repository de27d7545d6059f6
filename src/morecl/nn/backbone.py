"""Pre-trained Vision Transformers as timm builds them, frozen.

A backbone is named in one of three ways:

- ``deit_small_patch16_224``: any of timm's ViTs that take adapters (:mod:`morecl.nn.families`), with timm's weights;
- ``vit_mini_patch4_32``: the default, shipped with this package (2.7 M parameters, 32 px);
- ``path/to/file.safetensors`` or ``.pth``: a local checkpoint. If timm knows the file's name, that is the architecture;
  otherwise it is derived from the shapes of the tensors. ``NAME@path/to/file`` names it explicitly.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import pickle
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import timm
import torch
from huggingface_hub import constants as hub  # timm's way to weights
from safetensors.torch import load_file
from timm.data import resolve_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from morecl.catalogue import SHIPPED
from morecl.errors import InputError, few, unknown_name
from morecl.files import expanded
from morecl.nn.available import ShapesOnly
from morecl.nn.families import FAMILIES, ViT, family_of, refusal
from morecl.nn.preprocess import IMAGENET_MEAN, IMAGENET_STD, InputSpec

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
CLASSIFIERS = ("head", "fc.")  # not used
HEAD_DIM = 64  # every ViT published by timm and the paper's DeiT-S has heads of 64 dimensions


@dataclass(frozen=True)
class Backbone:
    """A frozen ViT and how to build it again."""

    name: str
    architecture: str  # timm's name, or "" if it was derived from the weights
    vit: ViT
    input: InputSpec
    sha256: str  # of the weights in use
    state: Mapping[str, Tensor]  # the weights under timm's names, before anything is added to the network
    source_sha256: str = ""  # of weights from a file before they are resampled, which CPUs do differently; else ""


def load_backbone(spec: str, *, image_size: int | None = None, pretrained: bool = True, seed: int = 0) -> Backbone:
    """Build the backbone ``spec`` (see the module's docstring).

    Args:
        image_size: input size in pixels, if not the backbone's own; the position embedding is resampled to it.
        pretrained: ``False`` keeps timm's random initialisation, drawn from ``seed``.
    """
    require_file(spec)
    name, path = _parse(spec)
    state = _read_checkpoint(path) if path else None
    if state is not None and not _is_known(name):
        vit, cfg = _build_from_shapes(state, image_size, path)
    else:
        vit, cfg = _build(name, image_size, pretrained and path is None, seed)
    if pretrained and path is None and name == SHIPPED:
        state = _read_shipped()
    source_sha256 = ""
    if pretrained and state is not None:
        body = _body(state)
        source_sha256 = fingerprint(body)
        way_out = "" if _is_known(name) else f"If it is not a plain ViT, name its architecture: NAME@{path}"
        _load_state(vit, body, str(path or SHIPPED), way_out)
    vit.requires_grad_(False).eval()
    weights = vit.state_dict(keep_vars=True)
    return Backbone(
        name=spec,
        architecture=name if _is_known(name) else "",
        vit=vit,
        input=_input_spec(vit, cfg),
        sha256=fingerprint(weights),
        state=weights,
        source_sha256=source_sha256,
    )


def located(spec: str, directory: Path) -> str:
    """``spec`` with its path, if it has one, made relative to ``directory``."""
    name, path = _split(spec, directory)
    if path is None:
        return spec
    return f"{name}@{path}" if name else str(path)


def check_spec(spec: str) -> None:
    """Raise :class:`InputError` if no backbone has this name."""
    _parse(spec)


def require_file(spec: str) -> None:
    """Raise :class:`InputError` if ``spec`` names a file that is not there, or no backbone."""
    _, path = _parse(spec)
    if path is not None and not path.is_file():
        raise InputError(f"backbone file {path} does not exist")


def weights_in_file(spec: str) -> str:
    """``source_sha256`` of a backbone made from ``spec``; empty if that names no file, or one that is not there."""
    _, path = _parse(spec)
    return fingerprint(_body(_read_checkpoint(path))) if path is not None and path.is_file() else ""


def _body(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the classifier, in float32."""
    return {key: value.float() for key, value in state.items() if not key.startswith(CLASSIFIERS)}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and values of ``state``; independent of the file format."""
    digest = hashlib.sha256()
    for key in sorted(state):
        value = state[key].detach().cpu().contiguous()
        digest.update(f"{key}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.numpy().data)
    return digest.hexdigest()


def _split(spec: str, directory: Path) -> tuple[str, Path | None]:
    """``NAME``, ``PATH`` or ``NAME@PATH`` -> name ("" if not given), file."""
    if not spec.strip():
        raise InputError("backbone needs a name or a file; `morecl list backbones` shows the names")
    name, at, file = spec.partition("@")
    if at and _is_known(name):
        return name, directory / expanded(file)  # a shell expands no ~ behind the @
    path = directory / expanded(spec)
    return ("", path) if path.suffix in SUFFIXES or path.exists() else (spec, None)


def _parse(spec: str) -> tuple[str, Path | None]:
    """``NAME``, ``PATH`` or ``NAME@PATH`` -> architecture name, file."""
    name, path = _split(spec, Path())
    if path is not None:
        return name or path.name.split(".")[0], path
    if not _is_known(spec):
        modules = [module for family in FAMILIES for module in family.modules]
        known = [SHIPPED, *(name for module in modules for name in timm.list_models(module=module))]
        near = str(unknown_name("backbone", spec, known)).split(" Known:")[0]
        raise InputError(f"{near} `morecl list backbones` shows the names; for a file, give its path.")
    return spec, None


def _is_known(name: str) -> bool:
    return name == SHIPPED or timm.is_model(name)


def _build(name: str, image_size: int | None, pretrained: bool, seed: int) -> tuple[ViT, dict[str, object]]:
    """The network ``name`` without a classifier, and timm's input configuration for it.

    ``pretrained`` has timm load its weights; those of the shipped backbone are loaded by the caller.
    """
    if name == SHIPPED:
        vit = _vit(image_size or 32, patch=4, dim=192, depth=6, seed=seed)
        return vit, {"crop_pct": 1.0, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    size = {} if image_size is None else {"img_size": image_size}
    with torch.device("meta"), ShapesOnly():  # needs no memory, and no time
        plan = timm.create_model(name, num_classes=0)
    if reason := refusal(plan):
        raise InputError(f"backbone {name} {reason}")
    _check_size(name, plan, image_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with _without_retries() if pretrained else contextlib.nullcontext():
                vit = timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
        except TypeError as error:
            raise InputError(f"backbone {name}: cannot be built with image size {image_size} ({error})") from error
        except Exception as error:
            if not pretrained:
                raise
            raise InputError(
                f"backbone {name}: its weights could not be fetched through timm ({type(error).__name__}). Offline, "
                f"pass a file: --backbone {name}@path/to/weights.safetensors"
            ) from error
    return vit, dict(vit.pretrained_cfg)


def _check_size(name: str, vit: ViT, image_size: int | None) -> None:
    """Whether ``image_size`` can be cut into patches; what is left over at the edges is not seen."""
    patch = max(vit.patch_embed.patch_size)
    if image_size is None or (image_size >= patch and (vit.patch_embed.strict_img_size or image_size % patch == 0)):
        return
    whole = max(1, round(image_size / patch)) * patch
    raise InputError(
        f"backbone {name}: an image size of {image_size} cannot be cut into patches of {patch} pixels; "
        f"{whole} can, as every multiple of {patch}"
    )


@contextlib.contextmanager
def _without_retries() -> Iterator[None]:
    """If the hub's host name cannot be resolved, use the local cache only: offline, the hub client would retry for
    almost a minute. Behind a proxy the name need not resolve here, so the hub is asked as usual."""
    offline = hub.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urllib.parse.urlsplit(hub.ENDPOINT).hostname, 443)
        except OSError:
            hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline


def _vit(size: int, *, patch: int, dim: int, depth: int, seed: int) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer(
            img_size=size,
            patch_size=patch,
            embed_dim=dim,
            depth=depth,
            num_heads=max(1, dim // HEAD_DIM),
            num_classes=0,
        )


def _build_from_shapes(
    state: Mapping[str, Tensor], image_size: int | None, path: Path | None
) -> tuple[ViT, dict[str, object]]:
    """A ViT with the checkpoint's width, depth, patch size and grid; ImageNet normalisation as in DeiT."""
    try:
        dim, _, patch, _ = state["patch_embed.proj.weight"].shape
        depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
        grid = math.isqrt(state["pos_embed"].shape[1] - 1)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path} does not look like a timm ViT checkpoint (no {error}); name its architecture: NAME@{path}"
        ) from error
    vit = _vit(image_size or grid * patch, patch=patch, dim=dim, depth=depth, seed=0)
    return vit, {"crop_pct": 0.9, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def _read_shipped() -> dict[str, Tensor]:
    with resources.as_file(resources.files("morecl") / "assets" / f"{SHIPPED}.safetensors") as file:
        return load_file(file)


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, or of a ``.pth`` read with ``weights_only=True`` (no code is run).

    DeiT's training script, which wrote the authors' ``best_checkpoint.pth``, stores its arguments with the weights as a
    plain ``argparse.Namespace``, the only class that is allowed.
    """
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"backbone file {path} cannot be read: it holds more than weights, or is damaged") from error
    except Exception as error:  # torch.load raises almost anything on a file that is no checkpoint
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise InputError(f"backbone file {path} cannot be read ({reason}); is it a checkpoint?") from error
    for wrapper in ("model", "state_dict"):  # DeiT's and Lightning's keys
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"backbone file {path} holds no table of tensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _load_state(vit: ViT, state: Mapping[str, Tensor], source: str, way_out: str = "") -> None:
    """Load ``state`` with its positions resampled; name all tensors that are missing, unknown or misshapen."""
    want = vit.state_dict()
    try:
        converted = family_of(vit).converted(dict(state), vit)
    except Exception:  # timm raises almost anything on odd shapes; what does not fit is named below
        converted = state
    fitted = {key: value for key, value in converted.items() if not key.startswith(CLASSIFIERS)}
    missing = sorted(want.keys() - fitted.keys())
    extra = sorted(fitted.keys() - want.keys())
    wrong = [
        f"{key} {tuple(fitted[key].shape)} instead of {tuple(want[key].shape)}"
        for key in sorted(want.keys() & fitted.keys())
        if fitted[key].shape != want[key].shape
    ]
    problems = [
        f"{label}: {few(keys, 8)}"
        for label, keys in (("missing", missing), ("wrong shape", wrong), ("not expected", extra))
        if keys
    ]
    if problems:
        raise InputError(f"the weights in {source} do not fit the network. {'; '.join(problems)}. {way_out}".strip())
    vit.load_state_dict(fitted)


def _input_spec(vit: ViT, cfg: dict[str, object]) -> InputSpec:
    size = vit.patch_embed.img_size[0]
    data = resolve_data_config(pretrained_cfg=cfg | {"input_size": (3, size, size)})
    resize = math.floor(size / data["crop_pct"])
    return InputSpec(size, resize, tuple(data["mean"]), tuple(data["std"]))
