"""Planning: from shapes, budgets and the machine to a plan that the engine executes."""
