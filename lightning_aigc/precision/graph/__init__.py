"""Forward and backward of a denoiser as graphs of the device, which a replay runs without Python."""
