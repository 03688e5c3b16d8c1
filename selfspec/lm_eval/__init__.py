"""lm-evaluation-harness with drafted generation: `python -m selfspec.lm_eval run --model selfspec ...`.

Knows nothing of drafts: it hands on what is generated with.
"""
