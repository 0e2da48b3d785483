"""Builds and compiles the model that the settings name, inside a strategy's scope."""

import tensorflow as tf

from fashion_oct import input_pipeline, models, schedules
from fashion_oct.errors import InputError
from fashion_oct.options import Config
from fashion_oct.planning import Plan


def build(
    config: Config, strategy: tf.distribute.Strategy, spec: input_pipeline.DataSpec, plan: Plan
) -> tf.keras.Model:
    """Builds and compiles the model inside the strategy's scope."""
    tf.keras.mixed_precision.set_global_policy(plan.precision)
    with strategy.scope():
        model = build_network(config, spec)
        compile_model(model, config, plan)
    return model


def build_network(config: Config, spec: input_pipeline.DataSpec) -> tf.keras.Model:
    """Builds the network that `config.model` names. To add one: one function in models.py, and its call here."""
    if config.model == "convnet":
        return models.convnet(spec.image_shape, spec.num_classes)
    return models.vgg16(
        spec.image_shape,
        spec.num_classes,
        weights=config.weights,
        input_scaling=config.input_scaling,
        head=config.head,
    )


def compile_model(model: tf.keras.Model, config: Config, plan: Plan) -> None:
    """Compiles a model for training; to be called inside the strategy's scope."""
    model.compile(
        optimizer=tf.keras.optimizers.Adam(learning_rate(config, plan)),
        # integer labels: the same loss as categorical cross-entropy of one-hot labels
        loss=tf.keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        steps_per_execution=plan.steps_per_execution,
        jit_compile=config.jit_compile,
    )


def learning_rate(config: Config, plan: Plan):
    """Returns the rate for the optimizer: a number where it is constant, else a schedule of the step."""
    warmup_steps = round(config.warmup_epochs * plan.steps_per_epoch)
    if config.lr_schedule == "constant" and not warmup_steps:
        return plan.learning_rate
    if warmup_steps >= plan.num_steps:
        raise InputError(
            f"--warmup_epochs={config.warmup_epochs} is {warmup_steps} steps, but the run has {plan.num_steps}: "
            "give fewer epochs of warm-up"
        )
    return schedules.WarmupThenDecay(
        plan.learning_rate, plan.num_steps, warmup_steps=warmup_steps, decay=config.lr_schedule
    )
