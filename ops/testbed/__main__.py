"""`python -m arriero.ops.testbed`: the real pair until Ctrl-C; its two addresses go to the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import click

from arriero.ops.testbed.kafka import kafka_jars
from arriero.ops.testbed.pair import cache_folder, keep_pair, run_pair
from arriero.schemas.errors import SetupError


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@click.command(help="Runs a real Kafka and a real Redis on free ports until Ctrl-C.")
@click.option("--keep", type=click.Path(path_type=Path), hidden=True, help="Keep a shared pair while it is used.")
@click.option("--fetch", is_flag=True, help="Only fetch Kafka's jars into the cache folder.")
def main(keep: Path | None, fetch: bool) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if fetch:
            kafka_jars(cache_folder())
            return
        if keep is not None:
            keep_pair(keep)
            return
        with run_pair() as pair:
            click.echo(f"--kafka {pair.bootstrap} --redis {pair.redis_url}")
            threading.Event().wait()
    except KeyboardInterrupt:
        pass
    except SetupError as error:
        click.echo(str(error), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
