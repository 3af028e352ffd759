"""NeMo Gym's token records, ledgers, manifests and rollout files read as captures of ours. README.md says how."""

from gristmill.interop.nemo_gym.reading import NEMO_GYM

__all__ = ["NEMO_GYM"]
