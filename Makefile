.PHONY: check test docs bench

check:
	ruff check .
	ruff format --check .

test:
	pytest

docs:
	mkdocs build --strict

bench:
	python -m tests.benchmarks.decode_vs_transformers
