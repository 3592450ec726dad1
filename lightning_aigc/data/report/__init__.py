"""The data report: findings and the checks that produce them."""
