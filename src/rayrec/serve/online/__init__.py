"""Requests answered over HTTP."""
