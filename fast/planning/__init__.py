"""Functions that compute the integers which attention needs in a step, such as slots and schedules."""
