"""selftask: self-supervised learning in vision that resumes bit for bit."""

__version__ = "0.1.0"
