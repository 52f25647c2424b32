"""Events of a run and the views of them."""
