"""Load an open_clip model with its tokenizer, and embed images and prompts with it."""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize, pad

from lightning_aigc.errors import ModelError, UserError

_DEFAULT_WEIGHTS = {
    "ViT-B-32": "laion2b_s34b_b79k",
    "ViT-B-16": "laion2b_s34b_b88k",
    "ViT-L-14": "laion2b_s32b_b82k",
    "ViT-H-14": "laion2b_s32b_b79k",
}
_REMEDY = (
    "offline, give `model` a folder with open_clip_config.json and weights, or `embedded:clip`, "
    "or `pretrained` a weights file"
)


def shared_clip_model(name: str, pretrained: str | None, device: torch.device) -> CLIPModel:
    """The CLIPModel of these arguments on this device: one in the process, for as long as somebody holds it.

    The callbacks of a run score with the same model; each with its own would cost a card hundreds of MiB.
    """
    found = _HELD.get((name, pretrained, device))
    if found is None:
        found = _HELD[name, pretrained, device] = CLIPModel(name, pretrained, device)
    return found


class CLIPModel:
    """An open_clip model that is frozen, in float32 and outside of every module tree and state dict.

    name: an open_clip model name, `hf-hub:ORG/REPO`, a local folder, or `embedded:NAME`.
    pretrained: an open_clip weights tag or a local file; a folder's own weights where None.
    Raises: ModelError naming the argument if model or weights cannot be had.
    """

    def __init__(self, name: str, pretrained: str | None, device: torch.device) -> None:
        import open_clip

        self.name, self.pretrained, self.device = name, pretrained, device
        source, weights_file = _locate(open_clip, name, pretrained)
        pretrained = pretrained or _DEFAULT_WEIGHTS.get(name)
        is_named = ":" not in source
        try:
            # open_clip initialises at random before it loads weights; the caller's random state stays.
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _root_logger_silent():
                warnings.filterwarnings("ignore", "QuickGELU mismatch")
                self.model: Any = open_clip.create_model(
                    source,
                    pretrained=pretrained if is_named and weights_file is None else None,
                    load_weights=weights_file is None,
                    require_pretrained=weights_file is None,
                    pretrained_text=False,
                    force_quick_gelu=is_named and "openai" in str(pretrained),
                )
            if weights_file is not None:
                open_clip.load_checkpoint(self.model, str(weights_file), strict=True)
            self.tokenizer: Any = open_clip.get_tokenizer(source)
        except Exception as error:  # open_clip, its hub client and pickle raise nearly everything
            reason = shorten(str(error).strip().partition("\n")[0], 200, placeholder=" ...") or type(error).__name__
            architecture = "state_dict" in str(error) or "size mismatch" in str(error)
            hint = f"the weights are of another architecture than {name}" if architecture else _REMEDY
            raise ModelError(
                f"cannot load CLIP with model={name!r}, pretrained={pretrained!r}: {reason}; {hint}"
            ) from error
        self.model.eval().requires_grad_(False).float().to(device)
        self.preprocessing: dict[str, Any] = dict(self.model.visual.preprocess_cfg)

    def on(self, device: torch.device) -> CLIPModel:
        """The model of these arguments on a device: itself, the one that is there already, or a copy."""
        if device == self.device:
            return self
        found = _HELD.get((self.name, self.pretrained, device))
        if found is None:
            found = _HELD[self.name, self.pretrained, device] = copy.copy(self)
            found.model, found.device = copy.deepcopy(self.model).to(device), device
        return found

    @torch.no_grad()
    def embed_images(self, images_N3HW: Tensor, batch_size: int) -> Tensor:
        """Unit embeddings [N, D] of images in 0..1; values that are not finite count as black."""
        parts = []
        with torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(images_N3HW), batch_size):
                batch = images_N3HW[start : start + batch_size]
                pixels = preprocess(batch.to(self.device, torch.float32).nan_to_num(0, 0, 0), self.preprocessing)
                parts.append(normalize(self.model.encode_image(pixels).float(), dim=-1))
        return torch.cat(parts)

    @torch.no_grad()
    def embed_prompts(self, prompts: Sequence[str], batch_size: int) -> Tensor:
        """Unit embeddings [N, D] of prompts; tokens beyond the model's length are cut off."""
        parts = []
        with torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(prompts), batch_size):
                tokens = self.tokenizer(list(prompts[start : start + batch_size])).to(self.device)
                parts.append(normalize(self.model.encode_text(tokens).float(), dim=-1))
        return torch.cat(parts)


_HELD: weakref.WeakValueDictionary[tuple[str, str | None, torch.device], CLIPModel] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def _root_logger_silent() -> Iterator[None]:
    """Leave out what open_clip logs to the root logger before it raises: the error says the same."""
    root = logging.getLogger()
    silent = logging.Filter("nobody")  # lets no record of the root logger pass
    root.addFilter(silent)
    try:
        yield
    finally:
        root.removeFilter(silent)


def preprocess(images_N3HW: Tensor, config: dict[str, Any]) -> Tensor:
    """open_clip's evaluation transform on tensors: resize with antialiasing, crop or pad, normalise.

    It differs from open_clip's own by the rounding to 8 bits, which is left out.
    """
    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else size
    mode = config.get("resize_mode", "shortest")
    rows, columns = images_N3HW.shape[-2:]
    if mode == "squash":
        target = (height, width)
    else:
        choose = max if mode == "shortest" else min
        ratio = choose(height / rows, width / columns)
        # torchvision's Resize, used for square models, rounds down where open_clip's own rounds to the nearest.
        to_whole = int if mode == "shortest" and height == width else round
        target = (max(1, to_whole(rows * ratio + 1e-9)), max(1, to_whole(columns * ratio + 1e-9)))
    if target != (rows, columns):
        kind = config.get("interpolation", "bicubic")
        kind = kind if kind in ("bicubic", "bilinear") else "bicubic"
        images_N3HW = interpolate(images_N3HW, target, mode=kind, antialias=True, align_corners=False).clamp(0, 1)
    top, left = _margin(target[0], height), _margin(target[1], width)
    if (top, left) != (0, 0) or target != (height, width):  # negative padding crops
        bottom, right = target[0] - height - top, target[1] - width - left
        fill = float(config.get("fill_color") or 0) / 255
        images_N3HW = pad(images_N3HW, (-left, -right, -top, -bottom), value=fill)
    mean, std = (images_N3HW.new_tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images_N3HW - mean) / std


def _margin(length: int, wanted: int) -> int:
    """Pixels to crop in front of a side, negative to pad it; rounded as open_clip rounds."""
    return round((length - wanted) / 2) if length > wanted else -((wanted - length) // 2)


def _locate(open_clip: Any, name: str, pretrained: str | None) -> tuple[str, Path | None]:
    """The name to ask open_clip for, and the weights file to load over it, if any."""
    from lightning_aigc.embedded import PREFIX, resolve

    weights_file = Path(pretrained).expanduser() if pretrained is not None else None
    if weights_file is not None and not weights_file.is_file():
        if weights_file.suffix or len(weights_file.parts) > 1:
            raise ModelError(f"got pretrained={pretrained!r}, which is not a file; {_REMEDY}")
        weights_file = None
    if name.startswith(("hf-hub:", "local-dir:")):
        return name, weights_file
    if not name.startswith(PREFIX) and name in open_clip.list_models():
        tags = open_clip.list_pretrained_tags_by_model(name)
        if weights_file is None and (pretrained or _DEFAULT_WEIGHTS.get(name)) not in tags:
            raise ModelError(
                f"got pretrained={pretrained!r} for model={name!r}; wanted a weights file or one of {tags}"
            )
        return name, weights_file
    try:
        folder = resolve(name)
    except UserError as error:
        raise ModelError(f"got model={name!r}: {error}") from error
    if (folder / "open_clip_config.json").is_file():
        return f"local-dir:{folder}", weights_file
    if folder.is_dir():
        raise ModelError(f"got model={name!r}, a folder without open_clip_config.json; {_REMEDY}")
    near = difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.5)
    known = f"; did you mean {near[0]}?" if near else ""
    raise ModelError(f"got model={name!r}, neither a folder nor an open_clip model{known}; {_REMEDY}")
