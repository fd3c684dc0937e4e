"""What each actor reserves, on clusters of several shapes."""

import pytest

from pipeline import flow
from pipeline.config import load_config
from pipeline.errors import ConfigError


@pytest.fixture
def plan(monkeypatch):
    def plan(nodes, actors, asked="auto"):
        alive = [{"Alive": True, "Resources": {"CPU": float(cpus)}} for cpus in nodes]
        dead = {"Alive": False, "Resources": {"CPU": 64.0}}
        monkeypatch.setattr(flow.ray, "nodes", lambda: [*alive, dead])
        monkeypatch.setattr(flow.ray, "cluster_resources", lambda: {"CPU": float(sum(nodes))})
        sets = ["input.path=x", "output.path=y", "model.target=z"]
        sets += [f"resources.num_actors={actors}", f"resources.num_cpus={asked}"]
        return flow.plan_shares(load_config([], sets, task="summarize"), 0).num_cpus

    return plan


@pytest.mark.parametrize(
    ("nodes", "actors", "share"),
    [
        ([2], 1, 1.5),
        ([2, 2], 2, 1.5),
        ([8, 8], 4, 3.5),
        ([4, 4, 4], 2, 4.0),  # 5.5 each, of a cluster in one piece
        ([8, 2, 2], 3, 2.6),  # all on the large one; of 3.5 there is room for two
        ([0, 8, 8], 2, 7.5),  # the head takes no work
    ],
)
def test_no_actor_spans_nodes(plan, nodes, actors, share):
    assert plan(nodes, actors) == pytest.approx(share)


def test_shares_that_no_node_has(plan):
    with pytest.raises(ConfigError, match=r"2 actors x 3 do not fit nodes of 4, 2 cores; use auto"):
        plan([4, 2], 2, asked=3)
    with pytest.raises(ConfigError, match=r"2 actors x 2 leave less than 0.4 of 4 cores"):
        plan([2, 2], 2, asked=2)
