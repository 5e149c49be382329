"""Process group, collectives, device and heartbeat of each rank."""
