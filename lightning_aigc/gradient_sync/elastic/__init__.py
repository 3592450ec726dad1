"""Averages of mode local among ranks that come and go: who takes part, their process group, and their weights."""

from lightning_aigc.gradient_sync.elastic.meeting_place import MeetingPlace

__all__ = ["MeetingPlace"]
