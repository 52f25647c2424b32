"""Declared features: functions of a log's columns, and side tables."""
