"""The table of GPUs, and the arithmetic on it, against the measurements that it is made from."""

import dataclasses

import pytest

from jfsdp.plan.cluster.hardware import GPUS, Cluster, find_gpu, link_bandwidth, matmul_rate
from jfsdp.plan.hlo.collectives import Collective
from jfsdp.plan.hlo.parse import Shape
from jfsdp.plan.time.rates import Rates
from jfsdp.trainer.run.metrics import peak_flops
from tests.refusals import refuses

MIB = 2**20
SIZES = [2**power for power in range(10, 35)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_plausible_and_says_where_its_numbers_come_from(gpu):
    assert "datasheet" in gpu.source
    assert 20e9 < gpu.memory_bytes < 200e9
    assert 0.5e12 < gpu.memory_bandwidth < 10e12
    assert gpu.peak_flops("bf16") == gpu.peak_flops("float16") >= 1.9 * gpu.peak_flops("tf32") > 0
    assert gpu.peak_flops("tf32") >= gpu.peak_flops("f32")
    # Multiply-adds of the plain cores at the table's clock: within a tenth of the datasheet's float32.
    cores = 2 * gpu.num_cores * gpu.fpus_per_core * gpu.clock_ghz * 1e9
    assert gpu.peak_flops("float32") == pytest.approx(cores, rel=0.1)
    assert gpu.domain_size % gpu.gpus_per_node == 0
    assert gpu.num_links == 0 or gpu.link_bandwidth / gpu.num_links in (25e9, 50e9)
    assert gpu.network_bandwidth <= gpu.link_bandwidth


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_run_s_mfu_knows_the_gpu_and_its_peak(gpu):
    assert peak_flops(gpu.full_name) == pytest.approx(gpu.peak_flops("bf16"), rel=2e-3)


def test_names_and_aliases_are_unique_and_found_in_any_case():
    names = [name for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    assert find_gpu("H100_SXM") is find_gpu("h100") is find_gpu(" h100-80gb ")
    assert find_gpu("gb200-NVL72").name == "gb200"
    assert find_gpu("A100").memory_bytes > 80e9


def test_a_file_describes_a_gpu_by_a_known_one(tmp_path):
    path = tmp_path / "b300.toml"
    path.write_text('like = "b200"\nfull_name = "NVIDIA B300"\nmemory_bytes = 288_000_000_000\nmeasured_matmul = []')
    found = find_gpu(str(path))
    changed = {"name": "b300", "full_name": "NVIDIA B300", "memory_bytes": 288_000_000_000, "measured_matmul": None}
    assert found == dataclasses.replace(find_gpu("b200"), **changed, aliases=())
    assert Cluster(found, 2).num_devices == 16


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('like = "b200"\nmemory_gb = 288', ("memory_gb", "memory_bytes")),
        ('like = "b200"\nclock_ghz = -1', ("clock_ghz", "-1", "docs/plan.md")),
        ('like = "b200"\nmemory_bandwidth = 0', ("memory_bandwidth", "0")),
        ('like = "b200"\npeak = {bfloat16 = "fast"}', ("peak", "fast")),
        ('like = "b2000"', ("b2000", "b200")),
        ('full_name = "NVIDIA B300"', ("missing", "capability")),
        ("like = b200", ("line 1",)),
        (None, ("No such file",)),
    ],
)
def test_a_file_that_describes_no_gpu_is_refused(tmp_path, text, facts):
    path = tmp_path / "b300.toml"
    if text is not None:
        path.write_text(text)
    refuses(lambda: find_gpu(str(path)), str(path), *facts)


def test_between_measured_sizes_the_rate_is_between_the_measured_rates():
    middle = link_bandwidth(find_gpu("h100"), 64 * MIB, True)
    assert middle == pytest.approx((259e9 + 344e9) / 2)  # halfway in log(size)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("inside", [True, False])
def test_larger_messages_are_never_slower_per_byte_nor_sooner_done(gpu, inside):
    rates = [link_bandwidth(gpu, size, inside) for size in SIZES]
    assert rates == sorted(rates)
    times = [size / rate for size, rate in zip(SIZES, rates, strict=True)]
    assert times == sorted(times)
    assert rates[-1] <= gpu.link_bandwidth
    assert rates[0] < 0.01 * gpu.link_bandwidth or not gpu.num_links  # a kilobyte is all latency


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_leaving_the_node_is_never_faster(gpu):
    for size in SIZES:
        inside = link_bandwidth(gpu, size, True)
        across = [link_bandwidth(gpu, size, False, members_per_node=count) for count in (1, gpu.gpus_per_node)]
        assert across[0] <= across[1] <= inside


def test_across_nodes_a_group_sends_through_the_adapters_of_its_members():
    h100 = find_gpu("h100")
    alone, together = (link_bandwidth(h100, 2**34, False, members_per_node=count) for count in (1, 4))
    assert alone == pytest.approx(50e9 * 0.85, rel=1e-3)
    assert together == pytest.approx(4 * alone, rel=0.01)


def test_between_racks_all_their_adapters_work_and_nvlink_is_the_limit():
    gb200 = find_gpu("gb200")
    assert link_bandwidth(gb200, 2**36, False) == pytest.approx(gb200.link_bandwidth * 0.8, rel=0.01)
    assert link_bandwidth(gb200, 2**36, False, members_per_node=4) == pytest.approx(4 * 50e9 * 0.85, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32"])
def test_matmuls_stay_below_the_peak_and_small_ones_waste(gpu, dtype):
    peak = gpu.peak_flops(dtype)
    large = matmul_rate(gpu, dtype, 16384, 16384, 16384)
    assert 0.6 * peak < large < peak
    assert matmul_rate(gpu, dtype, 128, 128, 128) < 0.1 * large
    assert matmul_rate(gpu, dtype, 16384, 16384, 64) < 0.5 * large


def test_a_matmul_of_one_row_takes_as_long_as_reading_its_matrix():
    h100 = find_gpu("h100")
    flops, size = 2 * 8192 * 8192, 2 * 8192 * 8192
    seconds = flops / matmul_rate(h100, "bf16", 1, 8192, 8192)
    assert seconds >= size / h100.memory_bandwidth


def test_one_row_more_than_whole_tiles_costs_a_tile():
    h100 = find_gpu("h100")
    assert matmul_rate(h100, "bf16", 128 * 132 + 1, 256, 8192) < 0.75 * matmul_rate(h100, "bf16", 128 * 132, 256, 8192)


def test_a_cluster_counts_its_devices_and_domains():
    cluster = Cluster(find_gpu("h100"), nodes=4)
    assert (cluster.num_devices, cluster.num_domains, cluster.devices_per_domain) == (32, 4, 8)
    assert not cluster.spans_nodes(range(8, 16))
    assert cluster.spans_nodes([7, 8])
    assert not cluster.spans_nodes([])
    assert Cluster(find_gpu("h100"), nodes=2, gpus_per_node=4).num_domains == 2, "smaller nodes do not join"


def test_the_rack_of_an_nvl72_counts_as_one_node():
    rack = Cluster(find_gpu("gb200"), nodes=36)
    assert (rack.num_devices, rack.num_domains, rack.devices_per_domain) == (144, 2, 72)
    assert not rack.spans_nodes(range(72))
    assert rack.spans_nodes(range(71, 73))
    part = Cluster(find_gpu("gb200"), nodes=32)  # 18 trays of 4 GPUs would fit, and do not divide 32
    assert (part.num_domains, part.devices_per_domain) == (2, 64)
    assert Cluster(find_gpu("gb200"), nodes=4).num_domains == 1


def test_a_group_gets_the_bandwidth_of_the_links_it_uses():
    h100 = find_gpu("h100")
    cluster = Cluster(h100, nodes=4)
    assert cluster.group_bandwidth(range(8), 2**31) == pytest.approx(402e9)
    assert cluster.group_bandwidth(range(32), 2**31) == link_bandwidth(h100, 2**31, False)
    assert cluster.group_bandwidth(range(0, 32, 8), 2**31) == link_bandwidth(h100, 2**31, False, members_per_node=1)


def test_an_all_to_all_sends_what_other_nodes_need_over_one_adapter():
    h100, rates = find_gpu("h100"), Rates(Cluster(find_gpu("h100"), nodes=4))

    def seconds(group, kind="all-to-all"):
        parts = (Shape("bf16", (2**30,)),)
        return rates.collective_s(Collective(kind, "x", parts, "bf16", tuple(group), 1, "main", 0, 1, False))

    adapter = link_bandwidth(h100, 2**31, False, members_per_node=1)
    assert seconds(range(32)) == pytest.approx(2**31 * 24 / 32 / adapter)  # 24 of 32 parts are for other nodes
    assert seconds(range(32), "all-gather") < seconds(range(32)) / 4
    assert seconds(range(0, 32, 8)) == seconds(range(0, 32, 8), "all-gather")
    assert seconds(range(8)) == seconds(range(8), "all-gather") == pytest.approx(2**31 * 7 / 8 / 402e9)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: find_gpu("h10O"), ("GPU", "'h10O'", "h100", "rtx4090")),
        (lambda: find_gpu("???"), ("there are a100-80, a100-40, ",)),
        (lambda: find_gpu("h100").peak_flops("int4"), ("h100:", "FLOP/s", "'int4'", "bfloat16")),
        (lambda: Cluster(find_gpu("h100"), nodes=0), ("nodes=0", "at least 1")),
        (lambda: Cluster(find_gpu("h100"), 2, 16), ("exceeds the 8 GPUs", "NVLink 4", "nodes=4, gpus_per_node=8")),
        (lambda: Cluster(find_gpu("h100"), 10**8), ("nodes=100000000", "800,000,000 devices", "at most 262,144")),
        (lambda: Cluster(find_gpu("gb200"), nodes=18).spans_nodes([72]), ("device 72", "72 GPUs")),
    ],
)
def test_what_no_cluster_has_is_refused_with_the_remedy(call, facts):
    refuses(call, *facts)
