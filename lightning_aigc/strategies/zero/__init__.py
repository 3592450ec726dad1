"""ZeRO stages 1 to 3."""
