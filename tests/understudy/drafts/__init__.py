"""Trainers of the drafts of the model in the box."""
