"""A scripted engine: a real tokenizer, scripted replies, true ids, and faults on command."""
