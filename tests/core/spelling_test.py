"""Tests of hints for misspelled names."""

from rljax.core import spelling


def test_the_closest_choice_is_offered():
  assert spelling.nearest('stps', ['steps', 'seed']) == (
    "; did you mean 'steps'?"
  )


def test_a_few_choices_are_listed_and_many_are_not():
  assert spelling.nearest('x', (c for c in ('lion', 'adamw'))) == (
    '; known: lion, adamw.'
  )
  assert spelling.nearest('x', [f'name{i}' for i in range(13)]) == '.'
