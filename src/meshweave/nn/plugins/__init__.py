"""Modules that other training software imports by name; each needs that software, and nothing else imports it."""
