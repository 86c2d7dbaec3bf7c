"""The cars of a run, shared by its processes."""

from __future__ import annotations

from racer.training.processes import broadcast_from_rank0, extend_timeout, rank, run_on_all, world_size
from racer_env import RacerVectorEnv


def make_envs(args) -> RacerVectorEnv:
    """This process's share of the cars, of the tracks and of the bridges."""
    extend_timeout(args.bridge_retries)  # starting bridges takes a while, too
    size, place, urls = world_size(), rank(), broadcast_from_rank0(lambda: args.urls)
    cars, tracks = args.num_envs // size, args.tracks
    if args.num_envs % size or cars < len(tracks):
        needed = f"a multiple of the number of processes ({size}), and give each a car on every track ({len(tracks)})"
        raise ValueError(f"--num-envs is {args.num_envs}; it must be {needed}")
    own_urls = urls[place::size] or urls[place % max(len(urls), 1) :][:1]
    return run_on_all(
        RacerVectorEnv, cars, tracks, args.config_path, own_urls or None, args.start, retries=args.bridge_retries,
        stagger=True, first_car=place * cars, stuck_ticks=args.stuck_ticks, off_road_penalty_scale=args.off_road_penalty_scale,
        action_repeat=args.action_repeat, gamma=args.gamma,
    )  # fmt: skip
