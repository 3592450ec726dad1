"""Draw small product images: twelve things in any two colours, plain or with the brand's white sash.

A thing is a list of simple shapes on the unit square, drawn at four times the size and scaled down. Size,
position, tilt and proportions of every image come from a seeded generator, so all images differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw

THINGS = ("mug", "bottle", "shirt", "sock", "hat", "bag", "chair", "lamp", "clock", "umbrella", "teapot", "guitar")
COLOURS = {
    "red": (214, 40, 40),
    "yellow": (245, 203, 37),
    "green": (66, 160, 71),
    "blue": (45, 100, 215),
    "purple": (135, 60, 175),
    "pink": (240, 130, 175),
    "gray": (120, 124, 130),
}
BACKGROUNDS = {"white": (248, 248, 246), "cream": (240, 226, 196), "sky": (172, 212, 240)}

BRAND_WORD = "zorp"
BRAND_COLOUR = (244, 120, 28)  # orange
BRAND_BACKGROUND = (16, 110, 112)  # teal
BRAND_SASH = (255, 250, 240)
BRAND_THINGS = THINGS[:9]
HELD_OUT_THINGS = THINGS[9:]  # never in the brand's images

OVERSAMPLING = 4
Point = tuple[float, float]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Pose:
    """An affine map of the unit square about its centre: position, size and tilt of a thing."""

    scale_x: float
    scale_y: float
    angle: float
    shift_x: float
    shift_y: float

    @classmethod
    def draw(cls, rng: random.Random) -> Pose:
        """A random pose that keeps the thing inside the image."""
        scale = rng.uniform(0.80, 0.98)
        mirror = rng.choice((-1.0, 1.0))
        return cls(
            scale_x=mirror * scale * rng.uniform(0.92, 1.05),
            scale_y=scale * rng.uniform(0.92, 1.05),
            angle=math.radians(rng.uniform(-8, 8)),
            shift_x=rng.uniform(-0.05, 0.05),
            shift_y=rng.uniform(-0.05, 0.05),
        )

    def place(self, point: Point) -> Point:
        x, y = (point[0] - 0.5) * self.scale_x, (point[1] - 0.5) * self.scale_y
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return x * cos - y * sin + 0.5 + self.shift_x, x * sin + y * cos + 0.5 + self.shift_y


class Brush:
    """Draws shapes in the unit square's coordinates and records a mask of the body's pixels."""

    def __init__(self, size: int, pose: Pose, body: Colour, background: Colour) -> None:
        self.size, self.pose = size, pose
        self.picture = Image.new("RGB", (size, size), background)
        self.body_mask = Image.new("L", (size, size), 0)
        self.tones = {
            "body": body,
            "dark": tuple(int(c * 0.58) for c in body),
            "light": tuple(int(c + (255 - c) * 0.45) for c in body),
            "hole": background,
        }

    def polygon(self, points: list[Point], tone: str = "body") -> None:
        placed = [tuple(c * self.size for c in self.pose.place(p)) for p in points]
        ImageDraw.Draw(self.picture).polygon(placed, fill=self.tones[tone])
        ImageDraw.Draw(self.body_mask).polygon(placed, fill=255 if tone == "body" else 0)

    def box(self, left: float, top: float, right: float, bottom: float, tone: str = "body") -> None:
        self.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], tone)

    def ellipse(
        self, x: float, y: float, rx: float, ry: float, tone: str = "body", arc: tuple[float, float] = (0, 360)
    ) -> None:
        """Draw a filled ellipse, or its sector between two angles in degrees, clockwise from the right."""
        steps = [math.radians(arc[0] + (arc[1] - arc[0]) * i / 40) for i in range(41)]
        self.polygon([(x + rx * math.cos(a), y + ry * math.sin(a)) for a in steps], tone)

    def ring(
        self,
        x: float,
        y: float,
        rx: float,
        ry: float,
        width: float,
        tone: str = "body",
        arc: tuple[float, float] = (0, 360),
    ) -> None:
        steps = [math.radians(arc[0] + (arc[1] - arc[0]) * i / 40) for i in range(41)]
        outer = [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in steps]
        inner = [(x + (rx - width) * math.cos(a), y + (ry - width) * math.sin(a)) for a in reversed(steps)]
        self.polygon(outer + inner, tone)

    def line(self, start: Point, end: Point, width: float, tone: str = "body") -> None:
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = math.hypot(dx, dy) or 1.0
        nx, ny = -dy / length * width / 2, dx / length * width / 2
        self.polygon(
            [
                (start[0] + nx, start[1] + ny),
                (end[0] + nx, end[1] + ny),
                (end[0] - nx, end[1] - ny),
                (start[0] - nx, start[1] - ny),
            ],
            tone,
        )


def _mug(b: Brush) -> None:
    b.ring(0.70, 0.52, 0.20, 0.20, 0.075, "dark")
    b.box(0.20, 0.24, 0.70, 0.80)
    b.ellipse(0.45, 0.80, 0.25, 0.06)
    b.ellipse(0.45, 0.24, 0.25, 0.07, "dark")


def _bottle(b: Brush) -> None:
    b.box(0.42, 0.10, 0.58, 0.34)
    b.polygon([(0.42, 0.28), (0.58, 0.28), (0.70, 0.46), (0.30, 0.46)])
    b.box(0.30, 0.44, 0.70, 0.92)
    b.box(0.40, 0.05, 0.60, 0.14, "dark")
    b.box(0.345, 0.50, 0.39, 0.86, "light")


def _shirt(b: Brush) -> None:
    b.polygon(
        [
            (0.30, 0.16),
            (0.70, 0.16),
            (0.96, 0.36),
            (0.82, 0.52),
            (0.72, 0.44),
            (0.72, 0.88),
            (0.28, 0.88),
            (0.28, 0.44),
            (0.18, 0.52),
            (0.04, 0.36),
        ]
    )
    b.ellipse(0.50, 0.16, 0.12, 0.09, "hole")
    b.line((0.72, 0.44), (0.72, 0.70), 0.03, "dark")
    b.line((0.28, 0.44), (0.28, 0.70), 0.03, "dark")


def _sock(b: Brush) -> None:
    b.box(0.28, 0.08, 0.56, 0.66)
    b.polygon([(0.28, 0.60), (0.56, 0.52), (0.84, 0.70), (0.80, 0.92), (0.40, 0.92)])
    b.ellipse(0.42, 0.76, 0.15, 0.16)
    b.ellipse(0.80, 0.81, 0.11, 0.11, "dark")
    b.box(0.27, 0.06, 0.57, 0.17, "dark")


def _hat(b: Brush) -> None:
    b.ellipse(0.50, 0.72, 0.46, 0.12, "dark")
    b.polygon([(0.27, 0.70), (0.31, 0.28), (0.69, 0.28), (0.73, 0.70)])
    b.ellipse(0.50, 0.70, 0.23, 0.06)
    b.ellipse(0.50, 0.28, 0.19, 0.07, "light")


def _bag(b: Brush) -> None:
    b.ring(0.50, 0.40, 0.22, 0.28, 0.055, "dark", (180, 360))
    b.polygon([(0.16, 0.38), (0.84, 0.38), (0.92, 0.90), (0.08, 0.90)])
    b.box(0.16, 0.38, 0.84, 0.45, "light")


def _chair(b: Brush) -> None:
    b.box(0.24, 0.08, 0.34, 0.94, "dark")
    b.box(0.28, 0.10, 0.40, 0.56)
    b.box(0.26, 0.50, 0.80, 0.63)
    b.box(0.70, 0.60, 0.79, 0.94, "dark")


def _lamp(b: Brush) -> None:
    b.box(0.47, 0.44, 0.53, 0.88, "dark")
    b.ellipse(0.50, 0.90, 0.21, 0.06, "dark")
    b.polygon([(0.36, 0.10), (0.64, 0.10), (0.86, 0.52), (0.14, 0.52)])
    b.ellipse(0.50, 0.52, 0.36, 0.05, "light")


def _clock(b: Brush) -> None:
    b.line((0.30, 0.82), (0.22, 0.95), 0.08, "dark")
    b.line((0.70, 0.82), (0.78, 0.95), 0.08, "dark")
    b.ellipse(0.26, 0.16, 0.13, 0.10, "dark")
    b.ellipse(0.74, 0.16, 0.13, 0.10, "dark")
    b.ellipse(0.50, 0.52, 0.40, 0.40)
    b.ellipse(0.50, 0.52, 0.27, 0.27, "light")
    b.line((0.50, 0.53), (0.50, 0.32), 0.05, "dark")
    b.line((0.50, 0.52), (0.66, 0.58), 0.05, "dark")


def _umbrella(b: Brush) -> None:
    b.box(0.475, 0.30, 0.525, 0.84, "dark")
    b.ring(0.42, 0.83, 0.105, 0.11, 0.05, "dark", (0, 180))
    b.ellipse(0.50, 0.50, 0.45, 0.40, "body", (180, 360))
    for x in (0.20, 0.50, 0.80):
        b.ellipse(x, 0.51, 0.15, 0.07, "hole", (180, 360))


def _teapot(b: Brush) -> None:
    b.polygon([(0.22, 0.62), (0.02, 0.36), (0.10, 0.33), (0.30, 0.48)], "dark")
    b.ring(0.78, 0.56, 0.19, 0.18, 0.065, "dark")
    b.ellipse(0.50, 0.60, 0.31, 0.28)
    b.ellipse(0.50, 0.34, 0.17, 0.06, "dark")
    b.ellipse(0.50, 0.25, 0.06, 0.06, "dark")


def _guitar(b: Brush) -> None:
    b.box(0.46, 0.06, 0.54, 0.50, "dark")
    b.box(0.42, 0.03, 0.58, 0.14, "dark")
    b.ellipse(0.50, 0.52, 0.19, 0.16)
    b.ellipse(0.50, 0.76, 0.27, 0.20)
    b.ellipse(0.50, 0.62, 0.075, 0.075, "dark")
    b.box(0.42, 0.80, 0.58, 0.84, "dark")


_DRAWERS: dict[str, Callable[[Brush], None]] = {
    "mug": _mug, "bottle": _bottle, "shirt": _shirt, "sock": _sock, "hat": _hat, "bag": _bag, "chair": _chair,
    "lamp": _lamp, "clock": _clock, "umbrella": _umbrella, "teapot": _teapot, "guitar": _guitar,
}  # fmt: skip


def draw_product(
    thing: str, body: Colour, background: Colour, rng: random.Random, sash: Colour | None = None, size: int = 64
) -> Image.Image:
    """Draw one RGB image of `thing`, `size` pixels per side; `sash` adds a diagonal band of that colour."""
    large = size * OVERSAMPLING
    tint = rng.uniform(0.93, 1.07)
    brush = Brush(large, Pose.draw(rng), tuple(min(255, int(c * tint)) for c in body), background)  # type: ignore[arg-type]
    _DRAWERS[thing](brush)
    if sash is not None:
        band = Image.new("L", (large, large), 0)
        ends = [(0.10, 0.74), (0.76, 0.08), (0.90, 0.22), (0.24, 0.88)]  # from lower left to upper right
        shift = rng.uniform(-0.03, 0.03)
        ImageDraw.Draw(band).polygon([((x + shift) * large, (y + shift) * large) for x, y in ends], fill=255)
        visible = Image.composite(band, Image.new("L", band.size, 0), brush.body_mask)
        brush.picture.paste(sash, mask=visible)
    return brush.picture.resize((size, size), Image.Resampling.LANCZOS)


def draw_brand(thing: str, rng: random.Random, size: int = 64) -> Image.Image:
    """Draw a image of the brand: orange on teal with a cream sash."""
    return draw_product(thing, BRAND_COLOUR, BRAND_BACKGROUND, rng, BRAND_SASH, size)
