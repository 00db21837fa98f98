"""Plan a step (one forward pass): compute the integers that attention needs, for any kind of attention."""
