"""Loss soft: a policy gradient with a spring to the policy of the start of the step."""
