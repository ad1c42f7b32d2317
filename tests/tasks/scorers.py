"""reasoning-gym's own scorers without any guard, for the sandbox's tests."""


def raw():
  """Returns a scorer of (generator's name, response to its first problem)."""
  import reasoning_gym

  def score(dataset, text):
    made = reasoning_gym.create_dataset(dataset, size=1, seed=0)
    return made.score_answer(text, made[0])

  return score
