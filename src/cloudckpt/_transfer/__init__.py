"""Moving bytes between memory and a store: checksums, retries, parallel uploads and reads. Knows no torch."""
