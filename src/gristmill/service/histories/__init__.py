"""What harnesses write down of their own sessions, read back as a result: one module a harness."""
