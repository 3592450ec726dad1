"""The verdict is decided by the noise of what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import (
    Curve,
    FineTuneFinding,
    FineTuneResult,
    GuardResult,
    Looks,
    LoRAFile,
    Paired,
    Picture,
    RunRecord,
)
from lightning_aigc.report.verdict import judge

LOW, HIGH = [0.30, 0.32, 0.34, 0.32], [0.70, 0.78, 0.82, 0.74]
SAME = [0.31, 0.31, 0.35, 0.31]
KEPT = Paired([0.90, 0.88, 0.92, 0.90], [0.89, 0.89, 0.91, 0.91])
LOST = Paired([0.90, 0.88, 0.92, 0.90], [0.50, 0.55, 0.45, 0.52])


def record(text: list[float] | None = None, **more: Any) -> RunRecord:
    scores = more.pop("scores", {})
    if text is not None:
        scores["clip_t"] = Paired(LOW, text)
    made = RunRecord("run", is_finished=True, steps=300, scores=scores, pictures=[Picture("a mug", 1)])
    made.curves["loss"] = Curve(list(range(1, 101)), [1.0] * 50 + [0.5] * 50)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def check(step: int, clip_t: list[float], clip_i: list[float]) -> Check:
    return Check(step, {"clip_t": clip_t, "clip_i": clip_i})


def guard(best: int, kept: bool = True) -> GuardResult:
    checks = [
        check(0, LOW, LOW),
        check(240, HIGH, HIGH),
        check(300, HIGH if best == 300 else SAME, HIGH),
    ]
    return GuardResult("clip_t", checks, best, "runs/x/zorp_best.safetensors" if kept else None)


def test_a_gain_beyond_the_noise_is_learned_with_its_word_step_and_memory() -> None:
    found = judge(
        record(HIGH, scores={"prior_clip_t": KEPT}, guard=guard(300), lora=LoRAFile("zorp.safetensors", "zorp"))
    )
    assert (found.kind, found.tone) == ("learned", "good")
    assert found.sentence == "Learned zorp: CLIP-T 0.32 → 0.76 ± 0.02; best at step 300, kept; nothing forgotten."


def test_a_rise_that_the_fine_tune_check_does_not_see_is_hardly_a_gain() -> None:
    said = judge(
        record([0.6, 0.62, 0.61, 0.63], fine_tune=FineTuneResult("", [FineTuneFinding("not_learned", "", "")]))
    )
    assert (said.kind, said.tone) == ("no gain", "mixed")
    assert said.sentence.startswith("Hardly a gain: CLIP-T ") and said.sentence.endswith("What to fix: not learned.")


def test_what_the_fine_tune_check_found_is_named_beside_the_gain() -> None:
    found = [FineTuneFinding(check, "", "") for check in ("bleeding", "colour_shift", "rank_unused")]
    said = judge(record([0.6, 0.62, 0.61, 0.63], fine_tune=FineTuneResult("", found)))
    assert said.kind == "learned" and said.tone == "mixed"
    assert said.sentence.endswith("; but see What to fix: bleeding, colour shift.")
    harmless = judge(record([0.6, 0.62, 0.61, 0.63], fine_tune=FineTuneResult("", found[2:])))
    assert harmless.tone == "good" and "mend" not in harmless.sentence


def test_a_gain_within_the_noise_is_none() -> None:
    found = judge(record([0.35, 0.30, 0.38, 0.28]))
    assert found.kind == "no gain" and "No gain beyond noise: CLIP-T 0.32 → 0.33 ± 0.02" in found.sentence
    assert "forgotten" not in found.sentence  # it was not measured


def test_pictures_that_look_like_the_training_pictures_count_where_the_text_score_does_not_know_the_word() -> None:
    assert judge(record(SAME, scores={"clip_i": Paired(LOW, HIGH)})).kind == "learned"
    assert "CLIP-I 0.32 → 0.76" in judge(record(SAME, scores={"clip_i": Paired(LOW, HIGH)})).sentence


def test_forgetting_must_be_clear_and_large() -> None:
    lost = judge(record(HIGH, scores={"prior_clip_t": LOST}))
    assert (lost.kind, lost.tone) == ("forgotten", "bad") and "0.90 → 0.51 ± 0.03" in lost.sentence
    hardly = judge(record(HIGH, scores={"prior_clip_t": Paired([0.9] * 4, [0.88, 0.879, 0.88, 0.881])}))
    assert hardly.kind == "learned" and "hardly lower" in hardly.sentence
    unclear = judge(record(HIGH, scores={"prior_clip_t": Paired([0.9] * 4, [0.9, 0.9, 0.9, 0.1])}))
    assert unclear.kind == "learned"  # one broken image of four is within its noise


def test_pictures_of_the_training_set_that_ignore_the_prompt_are_memorised() -> None:
    found = judge(record([0.1, 0.12, 0.1, 0.12], scores={"clip_i": Paired(LOW, HIGH)}))
    assert found.kind == "memorised" and "follow the prompt less" in found.sentence


def test_a_fall_is_worse_and_the_best_file_is_named() -> None:
    found = judge(record([0.1, 0.12, 0.1, 0.12], guard=guard(240)))
    assert found.kind == "worse" and "of step 240: use zorp_best.safetensors" in found.sentence


@pytest.mark.parametrize("end", [[math.nan] * 10, [math.inf] * 10, [9.0] * 10])
def test_a_loss_that_is_not_finite_or_far_above_its_beginning_has_diverged(end: list[float]) -> None:
    made = record(HIGH)
    made.curves["loss"] = Curve(list(range(1, 101)), [1.0] * 90 + end)
    found = judge(made)
    assert found.kind == "diverged" and ("step 91" in found.sentence or "from 1 to 9" in found.sentence)


def test_without_a_score_it_says_why() -> None:
    assert "RunReport has no clip_model" in judge(record()).sentence
    assert "no such judge" in judge(record(notes=["no CLIP score: no such judge"])).sentence
    assert "no images were drawn" in judge(record(pictures=[])).sentence
    one = record(scores={"clip_t": Paired([0.1], [0.9])})
    assert judge(one).kind == "not scored" and "one image" in judge(one).sentence


def test_a_controlnet_without_a_clip_score_is_judged_by_its_gap() -> None:
    figures = {"control_gap": -0.0004, "control_appeared_at_step": math.nan, "edge_f1": 0.47}
    found = judge(record(figures=figures))
    assert (found.kind, found.tone) == ("no gain", "bad")
    assert found.sentence.startswith(
        "No control yet: another image's condition changes the loss by 0.0%; edge F1 0.47."
    )
    found = judge(record(figures={"control_gap": 0.25, "control_appeared_at_step": 40.0}))
    assert (found.kind, found.tone) == ("learned", "good")
    assert found.sentence == (
        "Learned to follow its condition: control since step 40, and another image's condition raises the loss by 25%."
    )


def test_a_run_that_has_not_ended_has_no_verdict() -> None:
    assert judge(record(HIGH, is_finished=False)).kind == "not finished"


def looks(recognition: float = 0.4, changed: float = 0.2, ruined: int = 0, stderr: float = 0.05) -> Looks:
    return Looks(recognition, stderr, 0.9, changed, 8, [], ["noise"] * ruined)


def test_step_0_as_the_best_is_no_usable_file_whatever_rose() -> None:
    # 18 photographs on the tiny base: CLIP-I rose over coloured noise, and the page said "Learned".
    made = record(SAME, scores={"clip_i": Paired(LOW, HIGH)}, looks=looks())
    made.guard = GuardResult(
        "clip_t",
        [
            check(0, LOW, LOW),
            check(70, SAME, HIGH),
            check(140, SAME, HIGH),
        ],
        0,
    )
    found = judge(made)
    assert (found.kind, found.tone) == ("no usable file", "bad")
    assert (
        "no check scored better than step 0, the untrained model, beyond the noise (clip_t 0.32, then 0.32 at best)"
        in found.sentence
    )


@pytest.mark.parametrize(
    ("recognition", "kind"), [(0.4, "learned"), (0.11, "learned"), (0.09, "cannot tell"), (-0.2, "cannot tell")]
)
def test_a_judge_that_does_not_tell_the_base_s_images_from_shuffled_prompts_cannot_tell(
    recognition: float, kind: str
) -> None:
    found = judge(record(HIGH, scores={"clip_i": Paired(LOW, HIGH)}, looks=looks(recognition)))
    assert found.kind == kind
    if kind == "cannot tell":
        assert found.tone == "unknown" and "Learned" not in found.sentence
        assert f"they score {recognition:+.2f} ± 0.05 above shuffled prompts" in found.sentence


def test_a_judge_that_was_not_tried_is_believed() -> None:
    assert judge(record(HIGH, looks=looks(math.nan))).kind == "learned"


def test_images_that_became_noise_are_named_before_any_score() -> None:
    found = judge(record(HIGH, looks=looks(ruined=2)))
    assert (found.kind, found.tone) == ("ruined", "bad") and "2 of 8 images are noise, 0 were before" in found.sentence
    assert judge(record(HIGH, looks=looks(ruined=1))).kind == "learned"  # one of eight may be chance
    before = Looks(0.4, 0.05, 0.9, 0.2, 8, ["flat"] * 4, ["flat"] * 4)  # a base that draws flat images itself
    assert judge(record(HIGH, looks=before)).kind == "learned"


def test_other_prompts_that_fell_a_little_and_changed_in_every_pixel_are_forgotten() -> None:
    fell = {"prior_clip_t": Paired([0.9] * 4, [0.88, 0.879, 0.88, 0.881])}
    assert judge(record(HIGH, scores=dict(fell), looks=looks(changed=0.75))).kind == "forgotten"
    assert judge(record(HIGH, scores=dict(fell), looks=looks(changed=0.3))).kind == "learned"
    kept = judge(record(HIGH, scores={"prior_clip_t": KEPT}, looks=looks(changed=0.75)))
    assert kept.kind == "learned" and "nothing forgotten, though other prompts' images changed" in kept.sentence


def test_a_base_and_a_result_that_both_draw_noise_are_not_called_learned() -> None:
    found = judge(record(HIGH, looks=Looks(0.4, 0.05, 0.9, 0.2, 8, ["noise"] * 8, ["noise"] * 8)))
    assert (found.kind, found.tone) == ("cannot tell", "unknown")
    assert "8 of 8 images are noise, and 8 were before" in found.sentence


def test_other_prompts_whose_images_changed_are_named_without_a_score_and_no_good_news() -> None:
    unscored, kept = (judge(record(HIGH, scores=s, looks=looks(changed=0.75))) for s in ({}, {"prior_clip_t": KEPT}))
    assert unscored.tone == kept.tone == "mixed" and unscored.kind == "learned"
    assert "images of the other prompts, which have no score, changed" in unscored.sentence


def test_a_score_that_is_no_number_is_not_blamed_on_the_config() -> None:
    assert "no score that is a number" in judge(record(scores={"clip_t": Paired(LOW, [])})).sentence
    assert "no score that is a number" in judge(record(scores={"clip_t": Paired(LOW, [math.nan] * len(LOW))})).sentence


STAYS, LESS = [0.97, 0.96, 0.98, 0.97], [0.85, 0.84, 0.86, 0.86]


@pytest.mark.parametrize(
    ("after", "kept", "wanted"),
    [
        (HIGH, STAYS, ("learned", "good", "Learned the edit: in the direction of the target 0.32 → 0.76 ± 0.02; kee")),
        (HIGH, LESS, ("learned", "mixed", "; changes what should stay (0.97 → 0.85 ± 0.003).")),
        (SAME, STAYS, ("no gain", "mixed", "No gain beyond noise: in the direction of the target 0.32 → 0.32")),
        ([*LOW[:1], 0.1, 0.1, 0.05], STAYS, ("worse", "bad", "Got worse: in the direction of the target")),
        (HIGH[:1], STAYS[:1], ("not scored", "unknown", "Not decided: edit direction")),
    ],
)  # fmt: skip
def test_an_edit_is_judged_by_its_targets_direction_and_by_what_it_keeps(
    after: list[float], kept: list[float], wanted: tuple[str, str, str]
) -> None:
    scores = {"direction": Paired(LOW[: len(after)], after), "kept": Paired(STAYS[: len(kept)], kept)}
    found = judge(record(scores=scores))
    assert (found.kind, found.tone) == wanted[:2] and wanted[2] in found.sentence, found
