"""Shared by the endpoints and the dashboard: the gate, errors, authorization, and the state of the running server."""
