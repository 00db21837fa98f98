"""Functions that compute the integers for the attention of a step, such as slots and schedules."""
