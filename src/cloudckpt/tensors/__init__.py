"""Between tensors and bytes: views where the bytes can be used in place, bounded copies where they cannot."""
