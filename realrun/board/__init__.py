"""`realrun leaderboard`: all drafters of a target, each with its best policies, at equal cost accounting."""
