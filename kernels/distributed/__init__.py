"""Several ranks that run one model.

group.py    Group: the ranks and their collectives; join_group: joins the group that a RunnerConfig describes
"""
