"""What --mesh and the sizes say together."""

import pytest

from dsjax.config import DistributedConfig, EngineConfig, ParallelConfig, override_all
from dsjax.errors import ConfigError


def test_mesh_is_the_sizes_in_one_word():
    config = ParallelConfig.of(mesh="data:2,model:4,stage:3")
    sizes = config.data_parallel_size, config.tensor_parallel_size, config.pipeline_parallel_size
    assert sizes == (2, 4, 3) and config.num_devices == 24
    assert ParallelConfig().num_devices == 1
    assert override_all(EngineConfig(model="m"), [("parallel.mesh", "data:2")]).parallel.num_devices == 2


@pytest.mark.parametrize("mesh", ["data", "data:0", "data:x", "rows:2", "data:2,data:2", "data:-1", "data=2"])
def test_a_mesh_that_says_nothing_is_refused(mesh):
    with pytest.raises(ConfigError, match=f"mesh='{mesh}' must name each of data, model, stage"):
        ParallelConfig.of(mesh=mesh)


def test_contradictions_and_sizes_that_do_not_divide_are_refused():
    config = ParallelConfig(tensor_parallel_size=2)  # of a preset, say
    assert override_all(config, [("kv_parallel", "4"), ("mesh", "model:4")]) == ParallelConfig.of(
        "model:4", kv_parallel=4
    )
    assert override_all(config, [("tensor_parallel_size", "4"), ("mesh", "model:4")]).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="mesh='model:4' and tensor_parallel_size=2 differ"):
        override_all(config, [("tensor_parallel_size", "2"), ("mesh", "model:4")])
    with pytest.raises(ConfigError, match="kv_parallel=3 must divide tensor_parallel_size=4"):
        ParallelConfig(tensor_parallel_size=4, kv_parallel=3)
    with pytest.raises(ConfigError, match="data_parallel_size=0 must be at least 1"):
        ParallelConfig(data_parallel_size=0)


def test_a_micro_batch_holds_a_request():
    from configs.models import MODELS
    from dsjax.config import CacheConfig, SchedulerConfig
    from dsjax.load import make_runner

    with pytest.raises(ConfigError, match="num_microbatches=5 must be at most max_num_seqs=4"):
        make_runner(
            MODELS["tiny-mixed"](),
            None,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(max_num_seqs=4),
            parallel=ParallelConfig.of("stage:2", num_microbatches=5),
        )


def test_processes_need_an_address_and_an_id():
    DistributedConfig(num_processes=2, process_id=1, coordinator_address="localhost:1234")
    with pytest.raises(ConfigError, match="num_processes=2 needs coordinator_address"):
        DistributedConfig(num_processes=2)
    with pytest.raises(ConfigError, match=r"process_id=2 must be in \[0, num_processes=2\)"):
        DistributedConfig(num_processes=2, process_id=2, coordinator_address="a:1")
    with pytest.raises(ConfigError, match="peer_timeout_s=0"):
        DistributedConfig(peer_timeout_s=0)
