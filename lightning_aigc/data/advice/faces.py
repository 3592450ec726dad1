"""Faces that the crop cuts, or that are too small in latents for any model to learn.

Where masks are given, the masked part is the face, or whatever the subject is. Without masks this needs OpenCV (`pip
install 'lightning_aigc[faces]'`), whose Haar cascade finds upright faces of photographs, and misses profiles and
drawings. Without either nothing is checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.advice.dataset_summary import Material, crop_remedy, named
from lightning_aigc.data.images.crop import Sample, crop_offset
from lightning_aigc.data.images.image_file import load_mask, load_picture

MASKED = 127
"""Value of a mask, of 255, above which a pixel is the subject's."""
LONGEST_SIDE = 640
"""Pixels to which an image is reduced for the detector."""
LEAST_FACES = 0.25
"""Share of images with a face from which they are images of people; the detector errs on a few others."""
LEAST_SHARE_KEPT = 0.85
"""Share of a face's box that the crop must keep."""
PIXELS_A_CELL = 8
"""Pixels per latent cell of Stable Diffusion's autoencoder."""
LEAST_CELLS = 8
"""Latent cells of a face's height below which brows, eyes, nose and mouth share cells: `python -m tools.guide faces`
measures that 8 cells keep 95 % of faces apart, 6 cells 86 %, 4 cells 72 %."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom as shares of the image."""


def check_faces(material: Material) -> list[str]:
    """Report faces that the crop cuts and faces that are small after scaling."""
    cut: list[Sample] = []
    small: list[tuple[str, float]] = []
    with_face = 0
    boxes: dict[str, Sequence[Box]] = {}
    detector = _detector()

    def is_cut(sample: Sample) -> bool:
        return any(share_kept(face, sample) < LEAST_SHARE_KEPT for face in boxes[sample.name])

    for sample in material.looked_at:
        faces = boxes[sample.name] = _boxes(sample, detector)
        with_face += bool(faces)
        if is_cut(sample):
            cut.append(sample)
        cells = max((face_cells(face, sample) for face in faces), default=LEAST_CELLS)
        if cells < LEAST_CELLS:
            small.append((sample.name, cells))
    advice: list[str] = []
    if with_face < max(2, LEAST_FACES * len(material.looked_at)):
        return advice
    if cut:
        names = named([sample.name for sample in cut])
        remedy = crop_remedy(material, cut, is_cut)
        advice.append(f"the crop cuts a face or subject in {len(cut)} images ({names}): {remedy}")
    if small:
        least = min(cells for _, cells in small)
        advice.append(
            f"the largest face or masked subject is smaller than {LEAST_CELLS} latent cells "
            f"({LEAST_CELLS * PIXELS_A_CELL} pixels) in {len(small)} images ({named([name for name, _ in small])}; "
            f"{least:.1f} at the least): its eyes and mouth share cells and come out smeared; crop to the face, or "
            "raise data.init_args.resolution"
        )
    return advice


def share_kept(face: Box, sample: Sample) -> float:
    """The share of a face's box that stays in the training image."""
    placement = sample.placement
    left, top = crop_offset(placement)
    kept = 1.0
    for low, high, start, length, whole in (
        (face[0], face[2], left, placement.width, placement.scaled_width),
        (face[1], face[3], top, placement.height, placement.scaled_height),
    ):
        inside = min(high * whole, start + length) - max(low * whole, start)
        kept *= max(0.0, inside) / max((high - low) * whole, 1e-9)
    return kept


def face_cells(face: Box, sample: Sample) -> float:
    """A face's height in latent cells of the training image."""
    return (face[3] - face[1]) * sample.placement.scaled_height / PIXELS_A_CELL


def _boxes(sample: Sample, detector: Any) -> Sequence[Box]:
    if sample.mask is not None:
        mask_HW = np.asarray(load_mask(sample.mask)) > MASKED
        rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
        if not len(rows):
            return []
        height, width = mask_HW.shape
        return [(columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height)]
    return [] if detector is None else _find(detector, np.asarray(load_picture(sample.path)[0]))


def _detector() -> Any:
    try:
        cv2: Any = importlib.import_module("cv2")
    except ImportError:
        return None
    if not hasattr(cv2, "CascadeClassifier"):  # OpenCV 5 has moved it out of the main modules
        return None
    return cv2.CascadeClassifier(cv2.data.haarcascades + "haarcascade_frontalface_alt2.xml")


def _find(detector: Any, pixels_HW3: NDArray[np.uint8]) -> Sequence[Box]:
    cv2: Any = importlib.import_module("cv2")
    height, width = pixels_HW3.shape[:2]
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    gray = cv2.cvtColor(cv2.resize(pixels_HW3, size, interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY)
    boxes = detector.detectMultiScale(gray, scaleFactor=1.1, minNeighbors=5, minSize=(20, 20))
    return [(x / size[0], y / size[1], (x + w) / size[0], (y + h) / size[1]) for x, y, w, h in boxes]
