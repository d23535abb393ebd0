"""What hookscope costs beside what else a user could take, on the same work, in one session: `python -m benchmarks`."""
