"""Floor 1: host memory and devices; raw bytes without names or meaning."""
