"""Trainers of the drafts of the included model."""
