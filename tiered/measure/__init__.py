"""What the drives give for tensor swap: measured, beside fio, and told in one line (`tiered bench`)."""
