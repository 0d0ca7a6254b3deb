"""What the endpoints and the dashboard share: the gate, errors, who may call, and the state of the running server."""
