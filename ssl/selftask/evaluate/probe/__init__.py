"""Linear and attentive probes by the protocols of papers."""
