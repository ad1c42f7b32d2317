"""Calibration by hand and by pairs."""

from absl.testing import absltest, parameterized
import numpy as np

from rljax.objectives import calibration


class CalibrationTest(parameterized.TestCase):
  def test_expected_error_by_hand(self):
    confidence = np.array([0.1, 0.1, 0.95, 1.0])
    correct = np.array([0, 1, 1, 0])
    # Bin 1: mean 0.1 against 0.5; bin 9: 0.975 against 0.5; halves of all.
    expected = 0.5 * 0.4 + 0.5 * 0.475
    self.assertAlmostEqual(
      calibration.expected_error(confidence, correct), expected
    )
    # One bin sees the means alone.
    self.assertAlmostEqual(
      calibration.expected_error(confidence, correct, bins=1), 0.0375
    )

  def test_brier_by_hand(self):
    found = calibration.brier(np.array([0.9, 0.4, 0.0]), np.array([1, 1, 0]))
    self.assertAlmostEqual(found, (0.01 + 0.36) / 3)

  def test_auroc_counts_pairs(self):
    rng = np.random.default_rng(0)
    score, correct = rng.integers(6, size=40), rng.integers(2, size=40)
    right, wrong = score[correct == 1], score[correct == 0]
    above = right[:, None] > wrong[None]
    level = right[:, None] == wrong[None]
    expected = np.mean(above + 0.5 * level)
    self.assertAlmostEqual(calibration.auroc(score, correct), expected)
    self.assertAlmostEqual(calibration.auroc(-score, correct), 1 - expected)
    cubed = calibration.auroc(score**3, correct)
    self.assertAlmostEqual(cubed, expected)

  def test_auroc_of_one_kind_is_a_half(self):
    self.assertEqual(calibration.auroc(np.arange(3), np.ones(3)), 0.5)
    self.assertEqual(calibration.auroc(np.arange(3), np.zeros(3)), 0.5)

  @parameterized.parameters(
    ([0.5, 0.5], [1], r'confidence \(2,\) and correct \(1,\)'),
    ([], [], 'n > 0'),
    ([0.5], [0.5], 'correct must be 0 or 1'),
    ([np.nan], [1], 'confidence finite'),
    ([1.5], [1], r'must be in \[0, 1\], got \[1.5, 1.5\]'),
  )
  def test_bad_input_is_refused(self, confidence, correct, message):
    with self.assertRaisesRegex(ValueError, message):
      calibration.brier(np.array(confidence), np.array(correct))

  def test_bins_are_positive(self):
    with self.assertRaisesRegex(ValueError, 'bins=0 must be at least 1'):
      calibration.expected_error(np.ones(1), np.ones(1), bins=0)


if __name__ == '__main__':
  absltest.main()
