"""Several ranks that run one model.

group.py               Group: the ranks and their collectives; join_group: joins the group that a RunnerConfig describes
pipeline.py            stages, each with some of the layers
shared_experts.py      layers of experts that parts of data-parallel attention share; draft_experts.py: those of a draft
expert_exchange.py     the all-to-all of rows and experts; turns.py: one computation during another's collective
context_parallel.py    ranks divide the tokens of prompts
"""
