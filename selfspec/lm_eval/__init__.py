"""lm-evaluation-harness with speculative decoding: `python -m selfspec.lm_eval run --model selfspec ...`."""
