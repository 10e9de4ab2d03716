"""The state of running requests on the worker, by slot.

slots.py              SlotTable: tokens, page tables and limits of each slot
slot_error.py         the error of one request's step
slot_updates.py       releases, admissions and page grants of a step
step_rows.py          the rows of a step
bounded_tables.py     page tables of windows and states      in_flight_writes.py: pages that steps in flight write
cache_dtype.py, cache_size.py, group_sizes.py                the dtype, size and division of the cache
native_grammars.py    grammars in native steps on the CPU
"""
