"""Which plan to take, why not the others, and what would mend one that does not fit."""
