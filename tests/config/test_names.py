from weft.config import similar_names
from weft.config.names import did_you_mean


def test_the_nearest_name_comes_first():
    names = ["learning_rate", "learning_rates", "warmup", "rate"]
    assert similar_names("lerning_rate", names)[0] == "learning_rate"
    assert similar_names("Learning_Rate", names)[0] == "learning_rate"


def test_a_part_of_a_name_is_near():
    assert similar_names("dropout", ["dropout_rate_of_the_attention", "dim"]) == [
        "dropout_rate_of_the_attention"
    ]


def test_what_is_far_is_left_out():
    assert similar_names("xyz", ["learning_rate", "dim"]) == []


def test_the_sentence_names_at_most_three():
    assert did_you_mean("dim1", ["dim2", "dim3", "dim4", "dim5"]) == (
        "Did you mean 'dim2' or 'dim3' or 'dim4'?"
    )


def test_the_sentence_lists_all_where_none_is_near():
    assert did_you_mean("xyz", ["dim", "bias"]) == "There are: bias, dim."
    assert did_you_mean("xyz", []) == "There are none."
    assert did_you_mean("xyz", [f"field{i:02}" for i in range(20)]).endswith("field11, ….")
