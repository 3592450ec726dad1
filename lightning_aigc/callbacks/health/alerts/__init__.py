"""Alerts: their texts, their log and their repetition."""
