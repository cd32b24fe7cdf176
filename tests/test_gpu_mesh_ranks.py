"""`pdmesh up --device cuda --prefill-ep 2 --decode-ep 2`: a pool is two NVSHMEM PEs, on one GPU."""

import meshes
import pytest
import torch
from mesh_device_ranks import check_answers, check_loss, check_prefill_loss

pytestmark = pytest.mark.gpu


ONE_FORM = pytest.mark.parametrize("mesh", ["plain"], indirect=True)
"""What a lost rank does is the same whatever the form of the latents: it takes minutes once."""


@pytest.fixture(scope="module", params=["plain", "fp8"])
def mesh(request):
    topology = "[prefill]\nthreads = 1\n[decode]\nthreads = 1\nmicrobatch_rows = 4\nmax_batch = 4\n"
    arguments = ("--device", "cuda", "--prefill-ep", "2", "--decode-ep", "2")
    given = (*arguments, "--latents", request.param)
    with meshes.running_mesh(*given, topology=topology) as running:
        running.workers = 4
        yield running


async def test_answers_are_those_of_the_reference_but_for_near_ties(mesh):
    await check_answers(mesh, tokens=24, together=12)


def test_prefill_ranks_warmed_up_together(mesh):
    assert mesh.log().count("warmed up") >= 4


def test_graphs_of_both_schedules_and_of_an_idle_rank_were_captured(mesh):
    log = mesh.log()
    assert "captured a decode graph" in log
    assert "captured an idle rank's graph" in log
    assert "main microbatch" in log
    assert "main dispatch_overlap" in log


def test_all_workers_fit_the_device(mesh):
    free, total = torch.cuda.mem_get_info()
    assert free > 0.02 * total


@ONE_FORM
async def test_a_killed_rank_ends_its_group_which_forms_anew(mesh):
    await check_loss(mesh, tokens=200)


@ONE_FORM
async def test_a_killed_prefill_rank_ends_no_running_answer_and_its_group_forms_anew(mesh):
    await check_prefill_loss(mesh, tokens=1000)
