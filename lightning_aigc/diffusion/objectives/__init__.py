"""Training objectives: noise, timesteps, targets and losses of DDPM and of flow matching."""

from lightning_aigc.diffusion.objectives.ddpm import DDPM
from lightning_aigc.diffusion.objectives.flow import Flow
from lightning_aigc.diffusion.objectives.noise import SeededNoise, draw_noise
from lightning_aigc.diffusion.objectives.settings import Objective, ObjectiveSettings

__all__ = ["DDPM", "Flow", "Objective", "ObjectiveSettings", "SeededNoise", "draw_noise"]
