from weft.trainer.output_writer import BaseOutputWriter


class Kept(BaseOutputWriter):
    def write(self, *, input_batch, output_batch):
        self.__dict__.setdefault("rows", []).append((input_batch, output_batch))


def test_a_writer_that_does_not_buffer_needs_no_flush():
    writer = Kept.default_config().set(name="w").instantiate(parent=None)
    writer.write(input_batch={"x": 1}, output_batch={"y": 2})
    writer.flush()
    assert writer.rows == [({"x": 1}, {"y": 2})]
